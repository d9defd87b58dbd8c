"""Counting the machine instructions of prefill's products: the reader of listings, without a compiler."""

from __future__ import annotations

import pytest

from nanoqwen.bench import prefill_instructions as counting
from nanoqwen.bench.receipts import read_receipt, receipts_folder
from nanoqwen.cuda import prefill_plan as plans
from nanoqwen.cuda import sass
from nanoqwen.errors import DeviceError

LISTING = """
.text.one:
.L_x_0:
        /*0000*/                   LOP3.LUT R1, R2, R3, R4, 0x6a, !PT ;
        /*0010*/                   HGMMA.64x32x16.F32 R40, R104, gdesc[UR8], R40 ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32 R24, R112, gdesc[UR12], R24 ;
.L_x_2:
        /*0040*/              @!P1 BRA `(.L_x_2) ;
        /*0050*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


def test_products_have_a_width_and_a_place_of_their_weights():
    assert counting.products(LISTING) == [(32, True), (128, True), (128, False)]


def test_a_width_has_the_shortest_loop_that_holds_all_its_products():
    body = sass.parse(LISTING)["one"]
    loops = counting.main_loops(body, [32, 128, 128])
    assert {width: (loop.first, loop.last) for width, loop in loops.items()} == {32: (0, 2), 128: (3, 6)}
    assert sass.count(body, loops[128]) == {"HGMMA": 2, "BRA": 2}


def test_what_does_not_fit_together_is_refused():
    body = sass.parse(LISTING)["one"]
    with pytest.raises(DeviceError, match="do not agree"):
        counting.main_loops(body, [32, 128])
    with pytest.raises(DeviceError, match="no loop holds the products of 64 tokens"):
        counting.main_loops(body, [64, 128, 64])


def test_the_receipt_has_every_width_of_its_kernels_and_none_that_spills():
    results = read_receipt(receipts_folder() / f"{counting.NAME}.json")["results"]
    assert {kernel: set(found["widths"]) for kernel, found in results.items()} == {
        source + end: {str(w) for w in shape.widths} for source in counting.KERNELS for end, shape in plans.SHAPES.items()
    }
    for kernel, found in results.items():
        assert found["from_registers"] and found["spill_bytes"] == 0, kernel
        assert all(row["per_weight"] == round(row["instructions"] / counting.WEIGHTS_A_LANE, 3) for row in found["widths"].values())
