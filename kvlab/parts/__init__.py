"""Parts: what a lab has you write, put into the engine in the place of ours.

    Parts(free_queue=FreeQueue, fork=fork)         None, the default, is ours
        |
        |-- LLM("tiny", parts=parts)               the engine that serves a model
        |-- parts.make_engine(config)              the same engine on the slot-echo model: no torch
        '-- survive(parts)                         each part, alone and all together, in its smallest configurations

A part is a class or a function like ours, and the engine cannot tell the two apart; only what goes wrong is told
differently (PartError): which of your parts it was, with your own traceback. No layer of the engine imports this
package; it hands them in. A part that is not replaced costs nothing.
"""

from kvlab.parts.compose import Parts
from kvlab.parts.guard import PartError
from kvlab.parts.kinds import KINDS, Kind
from kvlab.parts.survival import SMALLEST, Outcome, Smallest, survive

__all__ = ["KINDS", "SMALLEST", "Kind", "Outcome", "PartError", "Parts", "Smallest", "survive"]
