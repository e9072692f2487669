"""python -m hpcdl is the hpcdl command."""

import sys

from hpcdl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
