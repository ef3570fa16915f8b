// What Python finds in the library; nothing else is visible.
#pragma once

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))
