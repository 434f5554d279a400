"""How much memory beams save by sharing blocks (claim C14, L33 2.4): share of blocks, against private copies.

    python benchmarks/beam_memory.py                     the shipped model, block size 16, widths 2, 4, 6
    python benchmarks/beam_memory.py --block-size 8 --model FOLDER

Every prompt is searched alone, past end-of-sequence, so that all outputs are equally long; figures are means over
prompts. Saved "on average" adds blocks up over all steps of a search, "at the peak" takes the step in which copies
would hold most, and the most that sharing could save is 1 - 1/width. Beyond the prompt, beams share what their common
ancestors wrote: how much that is depends on the model (how late its beams part) and on the block size. The paper on
paged attention (SOSP'23) measured 37.6% to 55.2%, on prompts of 19 and outputs of 58 tokens in the mean.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import kvlab.tiny
from kvlab import LLM, BeamSearchParams

SHAPES = [(19, 58), (64, 64), (256, 64), (256, 256), (1024, 64)]  # (prompt, output) tokens
WIDTHS = (2, 4, 6)


def make_prompts(llm: LLM, num_tokens: int, number: int) -> list[list[int]]:
    """Pieces of the shipped glossary, from different places."""
    glossary = (Path(kvlab.tiny.__file__).parent / "glossary.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in glossary.splitlines()]
    texts = [f"{entry['question']}\n{entry['answer']}\n" for entry in entries]
    tokens = [token for text in texts for token in llm.tokenizer.encode(text)]
    tokens *= -(-num_tokens // len(tokens)) + 1
    stride = (len(tokens) - num_tokens) // number
    return [tokens[i * stride : i * stride + num_tokens] for i in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4, help="of each length")
    args = parser.parse_args()
    torch.set_num_threads(1)
    longest = max(prompt + output for prompt, output in SHAPES)
    usable = max(WIDTHS) * -(-longest // args.block_size)
    llm = LLM(args.model, dtype="float32", block_size=args.block_size, num_gpu_blocks_override=usable + 1)
    print(f"model {args.model}, block size {args.block_size}, {args.prompts} prompts of each length\n")
    print("prompt  outputs  width   saved on average   at the peak   copies per output")
    for num_prompt, num_output in SHAPES:
        for width in WIDTHS:
            params = BeamSearchParams(beam_width=width, max_tokens=num_output, ignore_eos=True)
            found = [llm.beam_search([p], params)[0].memory for p in make_prompts(llm, num_prompt, args.prompts)]
            average = sum(memory.saved_on_average for memory in found) / len(found)
            peak = sum(memory.saved_at_peak for memory in found) / len(found)
            copies = sum(memory.num_copies for memory in found) / len(found) / num_output
            print(f"{num_prompt:6}  {num_output:7}  {width:5}   {average:16.1%}   {peak:11.1%}   {copies:17.2f}")


if __name__ == "__main__":
    main()
