"""Which tokens a block attends to, found from the lengths on the device.

    even      a block is a part: every sequence has as many parts as the plan says (plan.py)

              unit 0              unit 1            unit 2
              ├─────┬─────┬─────┤ ├─┬─┬─┤           ├────┬────┬────┤
              block 0     1     2 3 4 5             6    7    8

    balanced  the work of all units is one line, of which each worker has the same share

              unit 0                             unit 1  unit 2
              ├──────────┬──────────┬──────────┬├───────┼─┬────────┤
              worker 0   1          2          3          4

The line is measured in steps, a tile for each warp. A unit costs UNIT_STEPS besides; a step of
16-bit rows counts by its bytes. Each warp sees all lengths, so CUDA graphs stay valid. A part ends
where a worker's share or a segment ends. The part of worker w of segment i of the u-th unit has
place w + u * segments + i, which only grows along the line. A block that is no worker and whose
even part is empty ends early (`is_spare`).

Sources: Stream-K (https://arxiv.org/abs/2301.03598), Lean Attention
(https://arxiv.org/abs/2405.10480).
"""

from math import sqrt

from numba import cuda, float32, int32, uint32

from ..device.jit import device_function
from ..device.ptx import largest_word, sum_of_words, word_from_lane
from .spec import FIELD, MORE_PARTS, UNIT_STEPS

CAPACITY, SPLITS = FIELD["capacity"], FIELD["splits"]
ALIKE = 1.25  # times the mean that the longest sequence may cost while lengths count as alike
LOADED = 8  # lengths that a lane asks for at a time
MERGED = 32.0  # parts of a unit that a block merges while a warp attends to a tile


@device_function
def ceil_div(number, divisor):
    return uint32(uint32(number + uint32(divisor - uint32(1))) // divisor)


def make_survey(spec, rows_of):
    """The functions that see all sequences: their costs, and the one at a place of the line. Whole
    warps call them. rows_of: rows of each segment that are seen (positions.py)."""
    FIRST, SECOND, WEIGHT = spec.steps[0], spec.steps[1], spec.second_weight
    THREE = spec.segments == 3
    rows_one, rows_two, rows_three = rows_of

    @device_function
    def steps_of(common, segments, b):
        """Tokens of each segment of a sequence, in steps."""
        first = ceil_div(uint32(rows_one(common, segments, b)), uint32(FIRST))
        second = uint32(0)
        third = uint32(0)
        if THREE:
            second = ceil_div(uint32(rows_two(common, segments, b)), uint32(SECOND))
            third = ceil_div(uint32(rows_three(common, segments, b)), uint32(SECOND))
        return first, second, third

    @device_function
    def cost_of(steps):
        others = uint32(uint32(steps[1] + steps[2]) * uint32(WEIGHT))
        return uint32(uint32(uint32(UNIT_STEPS) + steps[0]) + others)

    @device_function
    def up_to(cost, lane):
        """The sum of a number over the lanes up to this one."""
        for i in range(5):
            step = uint32(1 << i)
            before = word_from_lane(cost, uint32(lane - step) & uint32(31))
            if lane >= step:
                cost = uint32(cost + before)
        return cost

    @device_function
    def survey(common, segments, batch):
        """The cost of all sequences, the largest, and that of a lane's."""
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        mine = uint32(0)
        largest = uint32(0)
        first = uint32(0)
        while first < batch:
            costs = cuda.local.array(LOADED, uint32)
            for i in range(LOADED):  # without branches, so that all loads are under way together
                b = uint32(uint32(first + uint32(32 * i)) + lane)
                costs[i] = cost_of(steps_of(common, segments, min(b, uint32(batch - uint32(1)))))
            for i in range(LOADED):
                cost = costs[i]
                if uint32(uint32(first + uint32(32 * i)) + lane) >= batch:
                    cost = uint32(0)
                mine = uint32(mine + cost)
                largest = max(largest, cost)
            first = uint32(first + uint32(32 * LOADED))
        return sum_of_words(mine), largest_word(largest), mine

    @device_function
    def find(common, segments, batch, columns, place, mine):
        """The sequence at a place of the line, and where on it its first unit begins."""
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        before = uint32(up_to(mine, lane) - mine)
        sequence = uint32(place // columns)  # units of a sequence cost the same
        here = before <= sequence and sequence < uint32(before + mine)
        of_lane = largest_word(lane if here else uint32(0))
        base = word_from_lane(before, of_lane)
        found = of_lane
        if batch > uint32(32):
            first = of_lane
            searching = uint32(1)
            while searching != uint32(0):
                b = uint32(first + uint32(32) * lane)
                cost = uint32(0)
                if b < batch:
                    cost = cost_of(steps_of(common, segments, b))
                upto = uint32(base + up_to(cost, lane))
                here = uint32(upto - cost) <= sequence and sequence < upto
                of_chunk = largest_word(uint32(lane + uint32(1)) if here else uint32(0))
                if of_chunk != uint32(0):
                    source = uint32(of_chunk - uint32(1))
                    found = word_from_lane(b, source)
                    base = word_from_lane(uint32(upto - cost), source)
                    searching = uint32(0)
                else:
                    base = word_from_lane(upto, uint32(31))
                    first = uint32(first + uint32(1024))
        return found, uint32(base * columns)

    return survey, find, steps_of, cost_of


@device_function
def are_alike(total, largest, batch):
    return float32(largest) * float32(batch) <= float32(total) * float32(ALIKE)


def make_share(spec):
    """Make the function that says how long a worker's share is."""
    WEIGHT = spec.second_weight

    @device_function
    def share_of(total, largest, columns, workers, most_parts):
        share = ceil_div(uint32(total * columns), workers)
        # no more parts of a unit than can be merged, nor so many that merging takes longer
        share = max(share, ceil_div(largest, uint32(most_parts - uint32(MORE_PARTS))))
        share = max(share, uint32(sqrt(float32(largest) / float32(MERGED))))
        return max(share, uint32(WEIGHT))  # a share has a step at least

    return share_of


def make_is_spare(spec, rows_of):
    """The function that says, from one length, whether a block's even part is surely empty."""
    STEP, rows_one = spec.steps[0], rows_of[0]

    @device_function
    def is_spare(common, segments, b, split, batch):
        if split == uint32(0) or split >= uint32(segments[0][SPLITS]) or b >= batch:
            return False
        return uint32(split * uint32(STEP)) >= uint32(rows_one(common, segments, b))

    return is_spare


def make_even_part(spec, firsts, rows_of):
    """Make the function that gives a split of a sequence."""
    FIRST, SECOND, THREE = spec.steps[0], spec.steps[1], spec.segments == 3
    # of a table only what is used can be read
    EARLY = spec.first.place != "paged" and "window" not in spec.variant
    first_one, first_two, first_three = firsts
    rows_one, rows_two, rows_three = rows_of

    @device_function
    def share_out(length, segment, step):
        """Rows of a sequence, tokens of a split, and splits that hold any."""
        splits = segment[SPLITS]
        if splits <= int32(1):  # most of the time: without divisions
            return length, length, int32(min(length, int32(1)))
        tokens = int32((length + splits - int32(1)) // splits)
        tokens = int32(max(int32((tokens + step - int32(1)) // step), int32(1)) * step)
        return length, tokens, int32((length + tokens - int32(1)) // tokens)

    @device_function
    def even_part(common, segments, b, split):
        """A split's segment and tokens; up to where to ask ahead; its number, and all parts."""
        one, two, three = segments
        which = uint32(0)
        number = split
        begin = first_one(common, segments, b)
        length, tokens, active = share_out(rows_one(common, segments, b), one, int32(FIRST))
        total = active
        splits = one[SPLITS]
        room = one[CAPACITY] if EARLY else int32(0)
        if THREE:
            second = share_out(rows_two(common, segments, b), two, int32(SECOND))
            third = share_out(rows_three(common, segments, b), three, int32(SECOND))
            total = int32(total + second[2] + third[2])
            if split >= splits:
                which = uint32(1)
                split = int32(split - splits)
                number = int32(active + split)
                begin = first_two(common, segments, b)
                length, tokens, active = second
                splits = two[SPLITS]
                room = two[CAPACITY]
                if split >= splits:
                    which = uint32(2)
                    split = int32(split - splits)
                    number = int32(number - splits + active)
                    begin = first_three(common, segments, b)
                    length, tokens, active = third
                    splits = three[SPLITS]
                    room = three[CAPACITY]
        if splits == int32(1):  # begins with its first row, whatever the length is
            end = int32(begin + length)
            return which, begin, end, max(room, end), uint32(number), uint32(total)
        first = int32(split * tokens)
        last = int32(min(int32(first + tokens), length)) if split < active else first
        end = int32(begin + last)
        return which, int32(begin + first), end, end, uint32(number), uint32(total)

    return even_part


def make_balanced_part(spec, firsts, rows_of, steps_of, cost_of):
    """Make the function that gives the part at a place of the line."""
    FIRST, SECOND, WEIGHT = spec.steps[0], spec.steps[1], spec.second_weight
    THREE, SEGMENTS = spec.segments == 3, spec.segments
    first_one, first_two, first_three = firsts
    rows_one, rows_two, rows_three = rows_of

    @device_function
    def workers_of(start, steps, weight, share):
        """The first worker that has a step of a segment, and how many have any."""
        first = uint32(start // share)
        count = uint32(0)
        if steps != uint32(0):
            last = uint32(start + uint32(uint32(steps - uint32(1)) * uint32(weight)))
            count = uint32(uint32(uint32(last // share) - first) + uint32(1))
        return first, count

    @device_function
    def tokens_between(first, length, start, weight, step, place, stop):
        """The tokens of a segment whose steps begin between two places of the line."""
        before = ceil_div(uint32(max(place, start) - start), uint32(weight))
        upto = ceil_div(uint32(max(stop, start) - start), uint32(weight))
        begin = int32(min(int32(before * uint32(step)), length))
        end = int32(min(int32(upto * uint32(step)), length))
        return int32(begin + first), int32(end + first)

    @device_function
    def balanced_part(common, segments, b, before, start, place, stop, share):
        """The part that begins at a place of the line, in a unit that begins at `start`, after
        `before` units: its segment and tokens; parts of the first segment, of two, of all; what to
        add to a part's number for its place, in each segment; where the part and the unit end."""
        steps = steps_of(common, segments, b)
        unit_end = uint32(start + cost_of(steps))
        stop = min(stop, unit_end)
        base = uint32(before * uint32(SEGMENTS))
        first = uint32(start + uint32(UNIT_STEPS))
        worker, of_first = workers_of(first, steps[0], 1, share)
        counts = (of_first, of_first, of_first)
        add_first = uint32(base + worker)
        adds = (add_first, add_first, add_first)
        which = uint32(0)
        part_end = stop
        row, length = first_one(common, segments, b), rows_one(common, segments, b)
        begin, end = tokens_between(row, length, first, 1, FIRST, place, stop)
        if THREE:
            second = uint32(first + steps[0])
            third = uint32(second + uint32(steps[1] * uint32(WEIGHT)))
            worker, count = workers_of(second, steps[1], WEIGHT, share)
            add_second = uint32(uint32(uint32(base + uint32(1)) + worker) - of_first)
            of_two = uint32(of_first + count)
            worker, count = workers_of(third, steps[2], WEIGHT, share)
            add_third = uint32(uint32(uint32(base + uint32(2)) + worker) - of_two)
            counts = (of_first, of_two, uint32(of_two + count))
            adds = (add_first, add_second, add_third)
            part_end = min(stop, second)
            if place >= third:
                which = uint32(2)
                part_end = stop
                row, length = first_three(common, segments, b), rows_three(common, segments, b)
                begin, end = tokens_between(row, length, third, WEIGHT, SECOND, place, stop)
            elif place >= second:
                which = uint32(1)
                part_end = min(stop, third)
                row, length = first_two(common, segments, b), rows_two(common, segments, b)
                begin, end = tokens_between(row, length, second, WEIGHT, SECOND, place, part_end)
            else:
                row, length = first_one(common, segments, b), rows_one(common, segments, b)
                begin, end = tokens_between(row, length, first, 1, FIRST, place, part_end)
        return which, begin, end, counts, adds, part_end, unit_end

    return balanced_part


@device_function
def rank_of(b, batch):
    """How many sequences come before a sequence on the line."""
    lane = uint32(b & uint32(31))
    of_lanes = uint32(uint32(lane * uint32(batch >> uint32(5))) + min(lane, batch & uint32(31)))
    return uint32(of_lanes + uint32(b >> uint32(5)))


@device_function
def following(b, batch):
    after = uint32(b + uint32(32))
    if after >= batch:
        after = uint32(uint32(b & uint32(31)) + uint32(1))
    return after
