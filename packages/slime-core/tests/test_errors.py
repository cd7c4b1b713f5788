from slime_core import errors


def test_every_error_is_one_of_slime_and_bad_bytes_are_bad_data():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert all(issubclass(kind, errors.SlimeError) and kind.__doc__ for kind in kinds)
    for kind in (errors.DamagedError, errors.FormatVersionError, errors.WrongBaseError):
        assert issubclass(kind, errors.IntegrityError) and issubclass(kind, errors.DataError)
    assert not issubclass(errors.ConfigError, errors.DataError)
