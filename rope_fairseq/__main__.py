"""``python -m rope_fairseq`` prints the folder to give to fairseq as ``--user-dir``."""

from pathlib import Path


def user_dir() -> Path:
    """The package's own folder, absolute."""
    return Path(__file__).absolute().parent


if __name__ == "__main__":
    print(user_dir())
