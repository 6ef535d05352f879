"""Moving reference: the KL penalty pulls towards a policy that follows the trained one.

https://arxiv.org/abs/2404.09656, as TRL's sync_ref_model. Every few steps the reference becomes a
mixture of its weights and the policy's. It needs no memory and hardly any time; checkpoints store
the reference too. In half precision the mixture is rounded, so a weight whose distance is below
1 / (2 share) units in the last place stays: use a share above 0.5. Use it if the start holds
the policy back although more reward is worth it. Do not use it to hold the policy near the start:
KL and its alarms then speak of the moved reference.
"""
