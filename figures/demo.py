"""demo.svg: the three pools of `kvlab demo` after one step. Run: python figures/demo.py

A terminal picture as SVG: letters and colours as on the screen, no font fetched from anywhere.
"""

import io
import re
from pathlib import Path

from rich.console import Console

# Rich's template without its web fonts.
from rich._export_format import CONSOLE_SVG_FORMAT
from kvlab.demo import PICTURED_STEP
