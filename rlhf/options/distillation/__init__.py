"""On-policy distillation: the reference of the KL penalty is a teacher."""
