"""On-policy distillation: a teacher grades each token of the policy's own responses.

With ``ppo.teacher_path`` the reference of the KL penalty is the teacher. With
``ppo.teacher_prompt_column`` the reference is also a teacher that reads another prompt, such as one
with the answer (OPSD, https://arxiv.org/abs/2601.18734); this takes one more pass of the reference
per rollout. Do not use it with a model that ignores hints.
"""
