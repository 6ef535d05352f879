"""Log whole steps of rollouts to rollouts.jsonl: all responses that the policy learned from.

Read them in the report, which shows the responses to one prompt side by side. A response costs
about 500 bytes, so choose ``ppo.log_rollouts_every`` by the size of a step.
"""
