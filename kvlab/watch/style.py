"""What marks mean, the same in every view and figure: a letter, a hue and a texture are an owner, a border is a state.

    owner    letter A to F + Okabe-Ito hue + texture          state   solid: held   double: shared   dashed: free
    count    always a number (x2)                             change  a thick outline: it changed in this step

Text is INK on white or on a hue of OWNERS (4.5:1 and more); every fill has an outline, so it reads without colour.
"""

from typing import NamedTuple


class Owner(NamedTuple):
    hue: str
    texture: str  # of TEXTURES in kvlab.watch.svg


INK, PAPER, QUIET, SHARED_FILL = "#111111", "#ffffff", "#555555", "#e4e4e4"
SMALLEST = 20  # the size of letters in a drawing of WIDTH: 16 px where it is shown 960 wide, 20 px on a projector
WIDTH, HEIGHT = 1200, 340  # of every drawing; with captions, question and buttons it fits 1200 x 560
OWNERS = {
    "A": Owner("#E69F00", "rising"),
    "B": Owner("#56B4E9", "dots"),
    "C": Owner("#009E73", "level"),
    "D": Owner("#F0E442", "falling"),
    "E": Owner("#CC79A7", "upright"),
    "F": Owner("#D55E00", "crossed"),
}
BLOCK_LEGEND = "solid: held; double: shared, with its count; dashed: free; thick: changed in this step"
NOBODY = Owner(PAPER, "plain")


def owner(letters: str) -> Owner:
    """How one owner is drawn; several have a grey of their own. From the seventh on, the letter alone tells."""
    return OWNERS.get(letters, NOBODY) if len(letters) < 2 else Owner(SHARED_FILL, "plain")
