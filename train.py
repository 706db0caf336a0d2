"""composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]: `maelm train` for Composer's launcher."""

import sys

from maelm_composer.train import main

if __name__ == '__main__':
    main(sys.argv[1:])
