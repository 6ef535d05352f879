"""Methods of papers (docs/methods.md), and commands that a run does without.

python -m rlhf_lab.advise [KEY=VALUE ...]       which advantage estimator suits a task
python -m rlhf_lab.gradients [KEY=VALUE ...]    the bias of a configuration's gradient
python -m rlhf_lab.verify RUN_DIR               a run beside its records
python -m rlhf_lab.bundle RUN_DIR FILE.zip      a run without weights as one file
"""
