"""Where the site and its source live, derived from one line of the catalog."""

import hashlib
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from course import catalog

HERE = Path(__file__).resolve().parent
VERSION = version("inference-from-scratch")


def addresses(repository: str) -> tuple[str, str]:
    """The site's address on GitHub Pages and its path there, for a repository on GitHub."""
    owner, name = urlsplit(repository).path.strip("/").split("/")
    return f"https://{owner.lower()}.github.io/{name}/", f"/{name}/"


def places(notebook: str) -> dict[str, str]:
    """Where a notebook of the repository can be solved without a set-up: name -> address."""
    project = urlsplit(catalog.repository()).path.strip("/")
    lab = quote(f"lab/tree/{notebook}", safe="")
    return {
        "Colab": f"https://colab.research.google.com/github/{project}/blob/main/{notebook}",
        "Binder": f"https://mybinder.org/v2/gh/{project}/main?urlpath={lab}",
    }


def report(pagename: str) -> str:
    """The address of a new issue about a page, with all that is known filled in."""
    page = f"{addresses(catalog.repository())[0]}{pagename}.html"
    body = f"Page: {page}\nVersion: {VERSION}\n\nWhat is wrong, and where:\n"
    filled = urlencode({"title": f"{pagename.rpartition('/')[2]}: ", "body": body})
    return f"{catalog.repository()}/issues/new?{filled}"


def configure(app, config):
    """Before any other extension reads the configuration."""
    repository = catalog.repository()
    site, path = addresses(repository)
    config.html_theme_options["repository_url"] = repository
    config.html_baseurl = site
    config.ogp_site_url = site
    config.notfound_urls_prefix = path
    # a change here re-reads every page, since any of them may depend on it
    code = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))
    config.course_extension = hashlib.sha256(code).hexdigest()


def setup(app):
    app.add_config_value("course_extension", "", "env")
    app.connect("config-inited", configure, priority=1)
