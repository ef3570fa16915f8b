// Marks the functions that Python calls; the library hides all other symbols.
#pragma once

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))
