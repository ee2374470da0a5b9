"""The command `pagecore whatif`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pagecore.cli.output import (
    check_distinct,
    check_picture,
    check_writable,
    print_columns,
    print_table,
    require,
    write_json,
    writing,
)
from pagecore.errors import UnsupportedOption

if TYPE_CHECKING:
    from pagecore.serving.whatif import WhatIfOptions

# Lines of the printed table.
SHOWN_SIZES = 12


def show_whatif(arguments: argparse.Namespace) -> int:
    """Print the hits of a trace over the size of the cache, and write the page, picture and figures."""
    require("whatif", "rich")
    from pagecore.serving.whatif import save_page, what_if
    from pagecore.serving.whatif.tables import curve_columns, summary_rows, tier_columns

    options = _options(arguments)
    for kind, check in (("html", check_writable), ("png", check_picture), ("json", check_writable)):
        if getattr(arguments, kind) is not None:
            check(f"--{kind}", getattr(arguments, kind))
    outputs = {f"--{kind}": getattr(arguments, kind) for kind in ("html", "png", "json")}
    check_distinct(outputs, trace=arguments.trace, configs=[arguments.model])
    result = what_if(arguments.trace, options)
    print_table(f"pagecore whatif {arguments.trace}", summary_rows(result))
    for i in range(len(result.curves)):
        print_columns(*curve_columns(result, i, SHOWN_SIZES))
    if result.tiers:
        print_columns("tiers", *tier_columns(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
    if arguments.html is not None:
        with writing("--html", arguments.html):
            save_page(result, arguments.html)
    if arguments.png is not None:
        from pagecore.serving.whatif.picture import save_picture

        with writing("--png", arguments.png):
            save_picture(result, arguments.png)
    return 0


def _options(arguments: argparse.Namespace) -> WhatIfOptions:
    from pagecore.serving.whatif import WhatIfOptions

    tiers: dict[str, str] = {}
    for text in arguments.tier:
        name, _, size = text.partition("=")
        if not name or not size:
            raise UnsupportedOption(f"tier is {text!r}; expected NAME=SIZE, such as CPU=256GiB")
        if name in tiers:
            raise UnsupportedOption(f"tier {name} is given twice, with {tiers[name]} and {size}; give it once")
        tiers[name] = size
    return WhatIfOptions(
        memory=arguments.memory,
        points=arguments.points,
        block_sizes=tuple(arguments.block_size),
        policies=tuple(arguments.evict),
        bytes_per_token=arguments.bytes_per_token,
        model=arguments.model,
        tiers=tiers,
        sample=arguments.sample,
        requests=arguments.requests,
        hash_block=arguments.hash_block,
        time_unit=arguments.time_unit,
        prefill_rate=arguments.prefill_rate,
    )
