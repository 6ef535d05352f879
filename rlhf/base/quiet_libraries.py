"""Keep what libraries print off the terminal."""

from __future__ import annotations

import logging
import warnings


def quieten_libraries() -> None:
    """Keep the libraries' progress bars and notices off the terminal; errors are still shown."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # setuptools logs every compiler that DeepSpeed tries to the root logger; Hydra's own messages
    # are kept.
    logging.getLogger("hydra").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    # deepspeed 0.19.8 under torch 2.13 uses the older names of two collectives.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
