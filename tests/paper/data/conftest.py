from tests.data.prepare.conftest import goes_on, texts_of, vocabulary  # noqa: F401
