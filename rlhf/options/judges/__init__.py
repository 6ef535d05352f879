"""Score responses by a language model that answers the questions of a rubric.

The judge gives each criterion a number on its scale, or compares the response with a reference
response in both orders (Zheng et al., https://arxiv.org/abs/2306.05685), so that a preference for a
position cancels. Each answer is stored under the hash of its request, so that a resumed or replayed
run reads the answer instead of asking again. A response costs one request per vote, or two if it is
compared. Do not use a judge if a rule can check the response: the policy learns what pleases the
judge.
"""
