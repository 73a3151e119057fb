"""The only room that knows distributed: plugins, and the seams they hang on."""
