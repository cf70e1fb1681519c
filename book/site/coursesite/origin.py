"""Where the site and its source live, derived from one line of the catalog."""

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

from course import catalog

HERE = Path(__file__).resolve().parent


def addresses(repository: str) -> tuple[str, str]:
    """The site's address on GitHub Pages and its path there, for a repository on GitHub."""
    owner, name = urlsplit(repository).path.strip("/").split("/")
    return f"https://{owner.lower()}.github.io/{name}/", f"/{name}/"


def configure(app, config):
    """Before any other extension reads the configuration."""
    repository = catalog.repository()
    site, path = addresses(repository)
    config.html_theme_options["repository_url"] = repository
    config.html_baseurl = site
    config.ogp_site_url = site
    config.ogp_image = f"{site}_static/card.png"
    config.notfound_urls_prefix = path
    # a change here re-reads every page, since any of them may depend on it
    code = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))
    config.course_extension = hashlib.sha256(code).hexdigest()


def setup(app):
    app.add_config_value("course_extension", "", "env")
    app.connect("config-inited", configure, priority=1)
