// Lines of the caches.
#pragma once

namespace tandem {

constexpr int kLineBytes = 64;

}  // namespace tandem
