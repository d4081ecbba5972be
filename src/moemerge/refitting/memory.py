"""What a refit holds beside the streamed models, told before it starts."""

from __future__ import annotations

from moemerge.features.taps import ExpertsTap
from moemerge.refitting.experts import SAMPLED
from moemerge.refitting.head import GROUP
from moemerge.refitting.linear import BLOCK_VALUES
from moemerge.refitting.prepare import RefitJob
from moemerge.refitting.streams import RefitStreams

# Hidden states of every token that are kept of a layer: of its source what two norms give, what
# attention says and the states before and after; of the merged model what is read now, what its
# attention says, the state before, and what is missing.
SOURCE_STATES = 5
MERGED_STATES = 4
# Of a map's Gram and cross products, in float64: the sums, their factor, the solution and what is
# compared with it, for calibration and held-out rows.
SUM_COPIES = 6
BLOCKS = 4  # of outputs in float32 at a time


def refit_bytes(job: RefitJob, streams: RefitStreams) -> int:
    """Records of a layer, the largest map's sums, and blocks of outputs."""
    stream = streams.merged.stream
    width = job.merged.architecture.hidden_size or 0
    tokens = sum(batch.tokens for batch in job.batches)
    states = (SOURCE_STATES + MERGED_STATES) * tokens * width * job.dtype.itemsize
    largest = 0
    for taps in stream.taps.layers:
        for tap in taps:
            if isinstance(tap, ExpertsTap):
                # Experts go one by one; the sums of those that choose λ are held together.
                values = max(
                    _values(stream.model.get_parameter(name).shape[1:])
                    for name in (tap.up, tap.down)
                )
                held = 2 * SAMPLED if job.ridge is None else 0
                largest = max(largest, (SUM_COPIES + held) * values)
            else:
                largest = max(largest, SUM_COPIES * _values(tap.shape))
    head = stream.taps.head
    resident = 0
    if head is not None and "head" in job.request.settings.parts:
        rows, inputs = head.shape
        largest = max(largest, SUM_COPIES * _values((min(rows, GROUP), inputs)))
        resident = (2 + len(job.sources)) * rows * inputs * job.dtype.itemsize
        resident += 2 * tokens * inputs * job.dtype.itemsize
    block = BLOCK_VALUES.get(job.device.type, BLOCK_VALUES["cpu"])
    return max(states, resident) + 8 * largest + 4 * BLOCKS * block


def _values(shape: tuple[int, ...]) -> int:
    """Of a Gram and of cross products, whichever side is the input."""
    return max(shape) ** 2 + shape[0] * shape[1]
