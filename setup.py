"""Put launch.py, conf/ and sweeps/ into the wheel, in rlhf/program; pyproject.toml has the rest."""

from setuptools import find_namespace_packages, setup

setup(
    script_name="setup.py",  # is no module of the mapped folder
    packages=[*find_namespace_packages(include=["rlhf*"]), "rlhf.program"],
    package_dir={"rlhf.program": "."},
)
