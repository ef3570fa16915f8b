// A line of the processor's caches: prefetches ask for whole lines, and threads that write to one
// line slow each other.
#pragma once

namespace tandem {

constexpr int kLineBytes = 64;

}  // namespace tandem
