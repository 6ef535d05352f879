"""Look at data before training: what is read, learned, skipped, cut, repeated and leaked.

``python -m rlhf.data FILE_OR_FOLDER`` prints it, and writes it as a page or as JSON.
"""
