// Resets the tile counter before a persistent forward. grid (1)
#include "../params.cuh"

extern "C" __global__ void __launch_bounds__(1) clear(const __grid_constant__ Params p) {
  *p.tile_counter = 0;  // @clear-tile-counter
}
