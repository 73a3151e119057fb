"""The only room that knows distributed: plugins, and the patches they need."""
