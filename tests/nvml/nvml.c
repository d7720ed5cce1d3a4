/* A libnvidia-ml.so.1 that says what the file $NVML_STUB says, read again at every call: a test changes the file
 * while the program under test runs. Lines:
 *
 *   driver RC                              what nvmlInit returns (0: a driver is there)
 *   device UUID USED_MIB TOTAL_MIB MIG RC CAPABILITY
 *                                          the next device; MIG 0 or 1, RC what calls about it return (15: GPU is
 *                                          lost), CAPABILITY its CUDA major version
 *   process DEVICE PID USED_MIB            a compute process on device number DEVICE
 *
 * Build: cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MANY 64
#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9

typedef int Result;
typedef void *Device; /* its number + 1 */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char uuid[80]; unsigned long long used, total; unsigned mig; Result rc; int capability; } About;

static int initialised;

/* What the file says now; returns nvmlInit's code. */
static Result look(About *devices, unsigned *count, Process *processes, unsigned of, unsigned *running) {
  Result driver = DRIVER_NOT_LOADED;
  const char *path = getenv("NVML_STUB");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[256];
  *count = *running = 0;
  if (!file) return driver;
  while (fgets(line, sizeof line, file)) {
    About about;
    unsigned device, pid;
    unsigned long long used;
    if (sscanf(line, "driver %d", &driver) == 1) continue;
    if (*count < MANY && sscanf(line, "device %79s %llu %llu %u %d %d", about.uuid, &about.used, &about.total,
                                &about.mig, &about.rc, &about.capability) == 6)
      devices[(*count)++] = about;
    if (*running < MANY && sscanf(line, "process %u %u %llu", &device, &pid, &used) == 3 && device == of)
      processes[(*running)++] = (Process){pid, used << 20, ~0u, ~0u};
  }
  fclose(file);
  return driver;
}

/* One device and its processes. */
static Result find(Device device, About *about, Process *processes, unsigned *running) {
  About devices[MANY];
  unsigned count, number = (unsigned)(size_t)device - 1;
  if (!initialised) return UNINITIALIZED;
  look(devices, &count, processes, number, running);
  if (number >= count) return INVALID_ARGUMENT;
  *about = devices[number];
  return about->rc;
}

#define FIND(device) \
  About about; Process processes[MANY]; unsigned running; \
  Result found = find(device, &about, processes, &running); \
  if (found) return found

Result nvmlInitWithFlags(unsigned flags) {
  About devices[MANY]; Process processes[MANY]; unsigned count, running;
  (void)flags;
  Result rc = look(devices, &count, processes, 0, &running);
  initialised = rc == OK;
  return rc;
}

Result nvmlShutdown(void) { initialised = 0; return OK; }

const char *nvmlErrorString(Result rc) {
  return rc == DRIVER_NOT_LOADED ? "Driver Not Loaded" : rc == 15 ? "GPU is lost" : "Stub error";
}

Result nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.99"); return OK; }

Result nvmlDeviceGetCount_v2(unsigned *count) {
  About devices[MANY]; Process processes[MANY]; unsigned running;
  if (!initialised) return UNINITIALIZED;
  look(devices, count, processes, 0, &running);
  return OK;
}

Result nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  *device = (Device)(size_t)(index + 1);
  FIND(*device);
  return OK;
}

Result nvmlDeviceGetName(Device device, char *text, unsigned size) {
  FIND(device);
  snprintf(text, size, "Stub GPU");
  return OK;
}

Result nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
  FIND(device);
  snprintf(text, size, "%s", about.uuid);
  return OK;
}

Result nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
  FIND(device);
  *memory = (Memory){about.total << 20, (about.total - about.used) << 20, about.used << 20};
  return OK;
}

Result nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
  FIND(device);
  *major = about.capability;
  *minor = 0;
  return OK;
}

Result nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
  FIND(device);
  *current = *pending = about.mig;
  return OK;
}

/* As the real one: asked with too small an array it says how many there are. */
Result nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *list) {
  FIND(device);
  unsigned room = *count;
  *count = running;
  if (!running) return OK;
  if (!list || room < running) return INSUFFICIENT_SIZE;
  memcpy(list, processes, running * sizeof *list);
  return OK;
}
