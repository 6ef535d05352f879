"""Results of papers, measured again: one module for each, with the claim and the criterion."""
