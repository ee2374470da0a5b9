"""Public classes can be inspected."""

import inspect

import pagecore


def test_every_public_class_that_users_construct_has_a_signature():
    made_by_others = {"Sequence", "Tensor"}
    classes = {name: value for name, value in vars(pagecore).items() if inspect.isclass(value)}
    for name, value in classes.items():
        if name in pagecore.__all__ and name not in made_by_others and not issubclass(value, BaseException):
            assert inspect.signature(value).parameters is not None, name
    assert "num_blocks" in inspect.signature(pagecore.BlockPool).parameters
    assert not pagecore.BlockPool.__doc__.startswith("BlockPool(")


def test_the_repr_of_a_cache_describes_it():
    cache = pagecore.PagedKVCache(pagecore.AttentionSpec(1, 8), num_blocks=9, device="none")
    cache.commit(cache.prepare([cache.add_sequence(range(20))], 20))
    assert repr(cache) == (
        "PagedKVCache(1 layers in 1 groups on 'none', 1 sequences, 2 of 8 blocks of 16 tokens in use)"
    )
