from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

from pagecore.arrays import Tensor, as_tensor, empty, like, zeros
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import DeviceError, PagecoreError, UnsupportedDtype, UnsupportedOption

rng = np.random.default_rng(3)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def random(shape, dtype):
    """Return a tensor of random elements, and the elements."""
    tensor = empty(shape, dtype)
    tensor[...] = rng.integers(0, 5, shape)
    return tensor, tensor.tolist()


class TestTorch:
    @EVERY_DTYPE
    def test_torch_and_pagecore_see_one_memory(self, torch, dtype):
        tensor, values = random((3, 4), dtype)
        for view in (torch.from_dlpack(tensor), like(tensor, torch.zeros(1)), torch.utils.dlpack.from_dlpack(tensor)):
            assert view.data_ptr() == tensor.pointer
            assert (str(view.dtype), tuple(view.shape)) == (f"torch.{dtype}", (3, 4))
            assert view.tolist() == values

    @EVERY_DTYPE
    def test_torch_tensors_are_viewed(self, torch, dtype):
        source = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
        for tensor in (
            as_tensor(source),
            as_tensor(source.__dlpack__()),
            as_tensor(source.__dlpack__(max_version=(1, 0))),
        ):
            assert (tensor.pointer, tensor.shape, tensor.dtype) == (source.data_ptr(), (3, 4), dtype)
            assert not tensor.readonly
            assert tensor.tolist() == source.tolist()

    def test_writes_are_seen_on_both_sides(self, torch):
        source = torch.zeros(4, dtype=torch.bfloat16)
        as_tensor(source)[1] = 3
        assert source.tolist() == [0, 3, 0, 0]
        tensor = zeros(4, "bfloat16")
        like(tensor, source)[2] = 5
        assert tensor.tolist() == [0, 0, 5, 0]

    @pytest.mark.parametrize(
        "view",
        [lambda t: t[:, ::2], lambda t: t.T, lambda t: t[1], lambda t: t[2, 3], lambda t: t[:0], lambda t: t[1:, None]],
    )
    def test_strides_cross_both_ways(self, torch, view):
        source = view(torch.arange(24.0).reshape(4, 6))
        tensor = as_tensor(source)
        assert (tensor.pointer, tensor.shape) == (source.data_ptr(), tuple(source.shape))
        again = like(tensor, source)
        assert again.data_ptr() == source.data_ptr()
        assert torch.equal(again, source)
        assert torch.equal(torch.from_dlpack(tensor), source)

    def test_broadcast_memory_crosses_both_ways(self, torch):
        source = torch.arange(3.0).expand(4, 3)
        assert as_tensor(source).strides == (0, 4)
        assert torch.equal(like(as_tensor(source), source), source)

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_memory_of_numpy_lives_until_both_sides_are_gone(self, torch, ours_first):
        array = np.ones(1000, "f4")
        held = weakref.ref(array)
        tensor = as_tensor(array)
        views = [like(tensor, torch.zeros(1)), torch.from_dlpack(tensor)]
        del array
        if ours_first:
            del tensor
            assert held() is not None
            assert all(view.sum().item() == 1000 for view in views)
            del views
        else:
            del views
            assert held() is not None
            assert tensor.numpy().sum() == 1000
            del tensor
        gc.collect()
        assert held() is None

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_memory_of_torch_lives_until_both_sides_are_gone(self, torch, ours_first):
        source = torch.ones(1000)
        held = weakref.ref(source)
        tensor = as_tensor(source)[10:]
        if ours_first:
            del tensor
            assert source.sum().item() == 1000
            del source
        else:
            del source
            assert tensor.numpy().sum() == 990
            del tensor
        gc.collect()
        assert held() is None

    def test_references_balance(self, torch):
        array, source = np.ones(4, "f4"), torch.ones(4)
        tensor = as_tensor(array)
        before = sys.getrefcount(array), sys.getrefcount(source)
        for _ in range(100):
            like(tensor, source)
            torch.from_dlpack(tensor)
            as_tensor(source)[1:]
        gc.collect()
        assert (sys.getrefcount(array), sys.getrefcount(source)) == before

    @pytest.mark.parametrize("parameter", [False, True])
    def test_gradients_are_refused_with_the_remedy(self, torch, parameter):
        source = torch.nn.Parameter(torch.ones(2)) if parameter else torch.ones(2, requires_grad=True)
        with pytest.raises(UnsupportedOption, match="detach"):
            as_tensor(source)
        assert as_tensor(source.detach()).pointer == source.data_ptr()
        with torch.no_grad(), pytest.raises(UnsupportedOption, match="detach"):
            as_tensor(source)

    def test_a_parameter_without_gradient_is_viewed(self, torch):
        source = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        assert as_tensor(source).pointer == source.data_ptr()
        assert like(as_tensor(source), source).data_ptr() == source.data_ptr()

    def test_lazy_negations_are_refused(self, torch):
        source = torch.zeros(3, dtype=torch.complex64).conj().imag
        assert source.is_neg()
        with pytest.raises(UnsupportedOption, match="resolve_neg"):
            as_tensor(source)
        with pytest.raises(UnsupportedOption, match="resolve_neg"):
            as_tensor(source.as_subclass(type("Derived", (torch.Tensor,), {})))

    @pytest.mark.parametrize(
        "make",
        [
            lambda torch: torch.ones(2, 2).to_sparse(),
            lambda torch: torch.ones(2, device="meta"),
            lambda torch: torch.zeros(2, dtype=torch.complex64),
            lambda torch: torch.zeros(2, dtype=torch.complex64).conj(),
            lambda torch: torch.zeros(2, dtype=torch.float64),
            lambda torch: torch.zeros((1,) * 9),
            lambda torch: torch._efficientzerotensor((2, 2)),
            lambda torch: torch.ones(2, 2).to_mkldnn(),
        ],
        ids=["sparse", "meta", "complex", "conjugate", "float64", "9 axes", "zero tensor", "mkldnn"],
    )
    def test_tensors_without_strided_memory_are_refused(self, torch, make):
        with pytest.raises(PagecoreError):
            as_tensor(make(torch))

    @pytest.mark.parametrize("dtype", ["float64", "int16", "uint16", "complex64"])
    def test_an_unsupported_dtype_is_named_with_the_dtypes_to_convert_to(self, torch, dtype):
        with pytest.raises(UnsupportedDtype, match=rf"{dtype}, .*convert to one of float32"):
            as_tensor(torch.zeros(2, dtype=getattr(torch, dtype)))

    def test_torch_gets_neither_read_only_memory_nor_negative_strides(self, torch):
        array = np.arange(4, dtype="f4")
        for example in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1))):
            with pytest.raises(UnsupportedOption, match="negative"):
                like(as_tensor(array)[::-1], example)
        array.flags.writeable = False
        for example in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1))):
            with pytest.raises(UnsupportedOption, match="read-only"):
                like(array, example)

    def test_torch_copies_on_demand(self, torch):
        tensor, values = random((3,), "bfloat16")
        copied = torch.from_dlpack(tensor, copy=True)
        assert copied.data_ptr() != tensor.pointer
        assert copied.tolist() == values

    def test_assignment_takes_torch_tensors_of_any_dtype(self, torch):
        tensor = zeros(3, "bfloat16")
        for dtype in (torch.bfloat16, torch.float64, torch.int16):
            tensor[:] = torch.arange(3).to(dtype)
            assert tensor.tolist() == [0, 1, 2]


class TestJax:
    @EVERY_DTYPE
    def test_jax_and_pagecore_see_one_memory(self, jax, dtype):
        tensor, values = random((4, 8), dtype)
        with jax.enable_x64(True):
            for view in (jax.dlpack.from_dlpack(tensor), like(tensor, jax.numpy.zeros(1))):
                assert view.unsafe_buffer_pointer() == tensor.pointer
                assert (str(view.dtype), view.shape) == (dtype, (4, 8))
                assert view.tolist() == values

    def test_a_deleted_array_is_refused(self, jax):
        source = jax.numpy.zeros(3) + 1
        source.delete()
        with pytest.raises(PagecoreError):
            as_tensor(source)

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_memory_of_numpy_lives_until_both_sides_are_gone(self, jax, ours_first):
        tensor = zeros(1024)
        tensor[:] = 1
        view = like(tensor, jax.numpy.zeros(1))
        if ours_first:
            del tensor
            gc.collect()
            assert float(view.sum()) == 1024
        else:
            del view
            gc.collect()
            assert tensor.numpy().sum() == 1024

    @pytest.mark.parametrize("ours_first", [True, False])
    def test_memory_of_jax_lives_until_both_sides_are_gone(self, jax, ours_first):
        source = jax.numpy.ones(1024) * 2
        tensor = as_tensor(source)[24:]
        if ours_first:
            del tensor
            gc.collect()
            assert float(source.sum()) == 2048
        else:
            del source
            gc.collect()
            assert tensor.numpy().sum() == 2000

    def test_references_balance(self, jax):
        array = zeros(1024).numpy()
        tensor = as_tensor(array)
        before = sys.getrefcount(array)
        views = [like(tensor, jax.numpy.zeros(1)) for _ in range(10)]
        assert sys.getrefcount(array) > before
        del views
        gc.collect()
        assert sys.getrefcount(array) == before


def test_cupy_gets_no_host_memory(monkeypatch):
    import types

    cupy = types.SimpleNamespace(ndarray=type("ndarray", (), {}))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceError, match="host"):
        like(empty(3), cupy.ndarray())


@pytest.mark.slow
def test_importing_pagecore_arrays_imports_no_framework():
    program = """
import sys
import numpy as np
import pagecore.arrays as arrays
tensor = arrays.as_tensor(np.zeros(3, "f4"))
arrays.like(arrays.empty(3), [1]), arrays.as_dtype("bfloat16"), tensor.numpy()
found = {"torch", "jax", "jaxlib", "cupy", "transformers"} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_type_of_a_view_is_tensor():
    assert type(as_tensor(np.zeros(1, "f4"))) is Tensor
