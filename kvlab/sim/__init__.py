"""Stand-ins for the GPU behind the real scheduler and manager. Plain Python."""

from kvlab.sim.slot_echo import SlotEchoRunner, echo_generate, echo_logprobs

__all__ = ["SlotEchoRunner", "echo_generate", "echo_logprobs"]
