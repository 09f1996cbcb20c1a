"""The settings and the URLs of the site."""
