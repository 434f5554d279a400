"""`python -m kvlab` is the command `kvlab`, for when scripts are not on the PATH."""

from kvlab.cli import main

if __name__ == "__main__":
    main()
