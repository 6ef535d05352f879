"""Start ``python -m rlhf.data``, whose code is in rlhf/look."""

from __future__ import annotations

import sys

from rlhf.look.look_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
