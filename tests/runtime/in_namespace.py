"""Run a Python program in a network namespace, on one core: NAMESPACE CORE, then its words.

As ``ip netns exec NAMESPACE taskset -c CORE python ...`` does, but fork_server.py can fork it.
"""

import os
import sys

from tests.forked_process import enter_network, run_program

namespace, core, *words = sys.argv[1:]
enter_network(os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC))
os.sched_setaffinity(0, {int(core)})
run_program(words)
