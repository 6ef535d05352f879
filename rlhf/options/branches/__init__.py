"""Values of states from Monte Carlo continuations, and a check of the critic against them."""
