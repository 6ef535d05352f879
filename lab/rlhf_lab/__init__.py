"""Methods of papers (docs/methods.md), and commands for studies of tasks, gradients and runs.

python -m rlhf_lab.advise [KEY=VALUE ...]       which advantage estimator suits a task
python -m rlhf_lab.gradients [KEY=VALUE ...]    the bias of a configuration's gradient
python -m rlhf_lab.verify RUN_DIR               check a run against its records
python -m rlhf_lab.bundle RUN_DIR FILE.zip      write a run, without weights, to one file
"""
