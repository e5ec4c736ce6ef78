// What the launchers of the norms and their device code agree on.
#pragma once

#include "kart/launch.h"

namespace kart {

constexpr int kMostThreads = 512;  // that share a row which is held

}  // namespace kart
