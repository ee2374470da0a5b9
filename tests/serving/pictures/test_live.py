"""Live block map in the terminal: content, refresh rate, and terminals without support."""

import io

import pytest

from tests.capabilities import require

require("rich")

from rich.console import Console  # noqa: E402

from pagecore import Plane, StateSpec  # noqa: E402
from pagecore.serving.pictures.live import REFRESHES_PER_SECOND, LiveMap  # noqa: E402
from pagecore.serving.pictures.palette import PALETTE  # noqa: E402
from tests.serving.pictures.pictured import FULL, WINDOWED, serve  # noqa: E402


def terminal(**options):
    return Console(
        file=io.StringIO(),
        **{"force_terminal": True, "record": True, "width": 60, "height": 24, "color_system": "truecolor"} | options,
    )


class Observer:
    """Watcher that captures the live map and the state of the cache at one step of a run."""

    def __init__(self, live, console, at=40):
        self.live, self.console, self.at = live, console, at

    def __call__(self, scheduler, metrics):
        self.live(scheduler, metrics)
        if metrics.steps == self.at:
            with self.console.capture() as captured:
                self.console.print(self.live._map)
            self.lines = captured.get().split("\n")
            self.stats, self.running = scheduler.cache.stats(), scheduler.num_running
            self.maps = [scheduler.cache.block_map(group) for group in range(scheduler.cache.num_groups)]


def observe(console, at=40, **options):
    ticks = iter(range(10**9))
    observer = Observer(LiveMap(console, clock=lambda: next(ticks)), console, at)
    serve([observer], **options)
    return observer


def test_the_live_map_shows_each_block_of_each_group_and_the_counters():
    seen = observe(terminal(color_system=None), layers=[FULL, WINDOWED], num_blocks=[46, 40])
    assert seen.lines[0].startswith(f"step 40   blocks held {seen.stats.utilization:.0%}   fragmentation ")
    assert seen.lines[1] == "group 0: 45 blocks"
    assert seen.lines[-2] == "▒ shared by several   ░ cached   · free"
    titles = [number for number, line in enumerate(seen.lines) if line.startswith("group")]
    for first, end, block_map in zip(titles, [titles[1], -2], seen.maps, strict=True):
        glyphs = "".join(seen.lines[first + 1 : end])
        width = len(glyphs) // (len(block_map.holders) - 1)
        assert width == 4
        for block in range(1, len(block_map.holders)):
            (glyph,) = set(glyphs[width * (block - 1) : width * block])
            if block_map.owner[block] < 0:
                assert glyph == ("░" if block_map.cached[block] else "·")
            else:
                assert (glyph == "▒") == (block_map.holders[block] > 1)
                assert glyph not in "░·"
        assert "░" in glyphs
        # Each sequence has its own letter while the letters suffice.
        letters = {(glyphs[width * (block - 1)], owner) for block, owner in enumerate(block_map.owner) if owner >= 0}
        alone = {pair for pair in letters if pair[0] != "▒"}
        assert len(alone) == len({glyph for glyph, _ in alone}) > 2


def test_a_pool_larger_than_the_terminal_is_sampled():
    seen = observe(terminal(width=10, height=9, color_system=None), num_blocks=60)
    assert seen.lines[1] == "group 0: 5"
    glyphs = "".join(seen.lines[2:-2])
    assert len(glyphs) == 20
    free = (~seen.maps[0].cached & (seen.maps[0].holders == 0))[1::3].tolist()
    assert [glyph == "·" for glyph in glyphs] == free


def test_a_tiny_terminal_raises_no_error():
    seen = observe(terminal(width=1, height=1), layers=[FULL, WINDOWED], num_blocks=[60, 60])
    assert seen.lines


def test_a_cache_without_blocks_shows_the_slots_of_its_states():
    state = StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=4, interval=16)
    seen = observe(terminal(width=200, color_system=None), at=10, layers=[state], num_blocks=None, num_states=30)
    held = seen.stats.num_states - seen.stats.num_free_states
    assert seen.lines[0].endswith(f"   state slots held {held} of {seen.stats.num_states}")
    assert not any(line.startswith("group") for line in seen.lines)


@pytest.mark.slow
def test_concurrent_runs_keep_different_colours_for_life():
    console = terminal()
    live = LiveMap(console, clock=iter(range(10**9)).__next__)
    colours = {}

    def watch(scheduler, metrics):
        live(scheduler, metrics)
        running = live._numbers.update(scheduler).values()
        for number in running:
            assert colours.setdefault(number, live._colours[number]) == live._colours[number]
        assert len({live._colours[number] for number in running}) >= min(len(running), len(PALETTE)) - 1

    serve([watch], count=100)
    assert len(colours) > 100
    assert len(live._colours) < 60


def test_a_truecolor_terminal_shows_the_colours_of_the_palette():
    seen = observe(terminal(), at=20, num_blocks=120, max_running=12)
    used = {tuple(bytes.fromhex(colour[1:])) for colour in PALETTE}
    assert sum(f"38;2;{red};{green};{blue}m" in "".join(seen.lines) for red, green, blue in used) == 7


def test_a_terminal_of_sixteen_colours_shows_seven_of_them():
    codes = {
        part.split("m")[0]
        for line in observe(terminal(color_system="standard"), at=20, num_blocks=120, max_running=12).lines
        for part in line.split("\x1b[")[1:]
    }
    assert len(codes - {"0", "1", "2"}) == len(PALETTE)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_block_characters_gets_ascii(encoding):
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), force_terminal=True, width=60, height=24)
    seen = observe(console)
    text = "".join(seen.lines)
    text.encode(encoding)
    assert "." in text
    assert "#" in text


def test_the_map_is_rendered_at_most_ten_times_a_second():
    now, drawn = 0.0, 0
    live = LiveMap(terminal(), clock=lambda: now)
    draw = live._render

    def counted(*arguments):
        nonlocal drawn
        drawn += 1
        return draw(*arguments)

    live._render = counted
    steps = 0

    def watch(scheduler, metrics):
        nonlocal now, steps
        live(scheduler, metrics)
        now += 0.01
        steps += 1

    serve([watch])
    assert steps / 10 * 0.9 < drawn <= steps / 10 + 1
    assert REFRESHES_PER_SECOND == 10


def test_a_live_map_is_shown_above_its_bar_and_cleared_at_the_end():
    console = terminal()
    with LiveMap(console, "the bar below", clock=iter(range(10**9)).__next__) as live:
        serve([live])
        live._live.refresh()
    text = console.file.getvalue()
    assert "group 0: 25 blocks" in text
    assert text.index("group 0") < text.rindex("the bar below")
    # The display is transient: the last output clears the lines above.
    assert text.endswith("\x1b[1A\x1b[2K")


def test_the_cursor_is_restored_when_the_run_fails():
    console = terminal()
    with pytest.raises(KeyboardInterrupt), LiveMap(console):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in console.file.getvalue()


@pytest.mark.parametrize("options", [{"force_terminal": False}, {"_environ": {"TERM": "dumb"}}])
def test_without_a_terminal_nothing_is_shown_or_inspected(options):
    console = terminal(**options)
    with LiveMap(console) as live:
        assert not live.is_shown
        live(None, None)
    assert console.file.getvalue() == ""
