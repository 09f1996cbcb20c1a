"""``python -m tidemill``."""

from tidemill.cli import main

if __name__ == "__main__":
    main()
