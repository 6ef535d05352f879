"""Look at data before training: what is read, learned, skipped, cut, repeated and leaked.

``python -m rlhf.data FILE_OR_FOLDER`` prints this, and can also write it as a page or as JSON.
"""
