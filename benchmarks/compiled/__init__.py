"""Memory and traffic as the compilers of present and absent devices state them."""
