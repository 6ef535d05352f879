"""Score responses by a language model that answers the questions of a rubric.

The judge gives each criterion a number on its scale, or compares the response with a reference
response (Zheng et al., https://arxiv.org/abs/2306.05685), which it sees in both orders, so that a
preference for a position cancels. Each answer is stored under the hash of its request, so that a
resumed or replayed run reads the answer instead of asking again. A response costs a request per
vote, two if it is compared. Do not use a judge if a rule can check the response: the policy
learns what pleases the judge.
"""
