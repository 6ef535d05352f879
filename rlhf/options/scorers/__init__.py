"""Score responses as texts by a sequence-classification model with its own tokenizer.

The score does not depend on the actor's tokens: prompt and response are written in the form that
the scorer was trained on, and encoded by its tokenizer. Use it for a reward model whose tokenizer
or template differs from the actor's, for one with two labels, or for an encoder. Do not use it for
a reward model with the actor's tokens: kind=model scores token ids, and the critic starts from it.
"""
