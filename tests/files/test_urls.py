"""Claims about files/urls.py: which paths are meant as URLs, and which URLs hold credentials."""

from __future__ import annotations

import pytest

from dtmega.files import urls


@pytest.mark.parametrize("path", ["s3:/bkt/run", "s3:bkt/run", "S3//bkt/run", "S3://bkt/run", "s3//bkt/run"])
def test_a_known_scheme_without_its_colon_and_slashes_is_refused_with_the_url(path):
    with pytest.raises(ValueError, match=r"expected s3://bkt/run, or \./ before the name of a folder"):
        urls.check(path)


@pytest.mark.parametrize("path", ["gs:/", "file:/tmp/x", "memory:x", "https:/h/x"])
def test_so_are_other_schemes(path):
    with pytest.raises(ValueError, match="got a path that begins with"):
        urls.check(path)


@pytest.mark.parametrize(
    "path",
    ["runs/12:30", "12:30", "./s3:/bkt", "s3/bkt", "data//mine", "bert:vocab", "s3://b/run@2", "memory://h:90/r@2"],
)
def test_other_colons_slashes_and_ats_are_names(path):
    assert urls.check(path) == path


@pytest.mark.parametrize("scheme", [*urls.SCHEMES, "other"])
@pytest.mark.parametrize("secret", ["user:SECRET", "SECRET", "user:SEC/RE@T", ":SECRET"])
def test_credentials_are_refused_whatever_the_scheme_and_not_repeated(scheme, secret):
    url = f"{scheme}://{secret}@host/x"
    if scheme in urls.PUBLIC_USER and ":" not in secret:
        assert urls.check(url) == url
        return
    with pytest.raises(ValueError, match=r"given with credentials or a query") as refused:
        urls.check(url)
    assert "SEC" not in str(refused.value)
    assert urls.masked(f"see {url}, there") == f"see {scheme}://***@host/x, there"


@pytest.mark.parametrize("url", ["s3:/user:SECRET@h/x", "s3//SECRET@h/x", "https://h/x?sig=SECRET", "az://h/x#SECRET"])
def test_nor_are_those_of_a_misspelled_url_or_a_query(url):
    with pytest.raises(ValueError, match=r"\w+://") as refused:
        urls.check(url)
    assert "SECRET" not in str(refused.value)


def test_a_url_is_no_local_path():
    with pytest.raises(ValueError, match="expected a local path, got the URL s3://bkt/run"):
        urls.check("s3://bkt/run", local=True)
