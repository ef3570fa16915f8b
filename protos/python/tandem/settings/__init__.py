"""
Settings of a service process: one schema, read from several sources. Only the services use this
package; clients and pure cores do without it.
"""
