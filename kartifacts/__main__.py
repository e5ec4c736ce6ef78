"""`python -m kartifacts`, for where the script is not on PATH."""

from __future__ import annotations

from kartifacts.cli import main

if __name__ == "__main__":
    main()
