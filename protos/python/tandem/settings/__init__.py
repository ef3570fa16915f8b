"""
Settings of a service process: one schema, read from several sources. Only the services use this
package, but for `options`, the table of their options, which the command line reads as well.
"""
