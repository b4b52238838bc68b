/* A CUDA driver for machines without one: enough of libcuda.so.1 that real PyCUDA and cuda-bindings import, manage
 * contexts, load modules, allocate and launch. Nothing is computed; what was called is written down.
 *
 * SKUDA_STUB_LOG=path      appends one line per call: thread, name, details; a launch's parameter bytes are in hex
 * SKUDA_STUB_FAIL=f:c,...  makes function f return CUresult c
 * SKUDA_STUB_DEVICES=n     how many GPUs there are (1)
 * SKUDA_STUB_LENIENT=1     a launch in a wrong context is not refused but runs there, on the wrong card
 * SKUDA_STUB_CAPTURING=n   streams other than the default one are being captured, under capture id n
 *
 * A test may capture with stub_capture, destroy graphs with stub_destroy, and count what is allocated with stub_live.
 *
 * As in the real driver, a function belongs to the context that its module was loaded in, and launching it while
 * another context is current is CUDA_ERROR_INVALID_HANDLE, while none is CUDA_ERROR_INVALID_CONTEXT.
 *
 * Functions that nothing here needs come from undefined.inc, which build.py makes from what the libraries at hand
 * import: UNSUPPORTED(name) for each.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int R;
typedef struct { int device, primary, retained; } Context;
typedef struct { Context *owner; } Module;
typedef struct { Context *owner; char name[120]; } Function;

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       NOT_SUPPORTED = 801, MOST_DEVICES = 8, DEPTH = 64 };

static Context primary[MOST_DEVICES];
static __thread Context *stack[DEPTH];
static __thread int depth;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

/* --- what is written down, and what is made to fail --------------------------------------------------------------- */

static void note(const char *name, const char *detail) {
  const char *path = getenv("SKUDA_STUB_LOG");
  if (!path) return;
  pthread_mutex_lock(&guard);
  FILE *file = fopen(path, "a");
  if (file) {
    fprintf(file, "%ld %s %s\n", (long)syscall(SYS_gettid), name, detail);
    fclose(file);
  }
  pthread_mutex_unlock(&guard);
}

static R failure(const char *name) {
  const char *plan = getenv("SKUDA_STUB_FAIL");
  size_t length = strlen(name);
  for (const char *at = plan; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
    if (!strncmp(at, name, length) && at[length] == ':') return atoi(at + length + 1);
  return OK;
}

#define CALLED(...) do { \
    char detail_[4200] = ""; \
    if (getenv("SKUDA_STUB_LOG")) snprintf(detail_, sizeof detail_, "" __VA_ARGS__); \
    note(__func__, detail_); \
    R failed_ = failure(__func__); \
    if (failed_) return failed_; \
  } while (0)

/* --- devices ------------------------------------------------------------------------------------------------------ */

R cuInit(unsigned flags) { CALLED("%u", flags); return OK; }
R cuDriverGetVersion(int *version) { CALLED(); *version = 13000; return OK; }
R cuDeviceGetCount(int *count) { CALLED(); *count = number("SKUDA_STUB_DEVICES", 1); return OK; }

R cuDeviceGet(int *device, int ordinal) {
  CALLED("%d", ordinal);
  if (ordinal < 0 || ordinal >= number("SKUDA_STUB_DEVICES", 1)) return INVALID_VALUE;
  *device = ordinal;
  return OK;
}

R cuDeviceGetName(char *name, int length, int device) {
  CALLED();
  snprintf(name, (size_t)length, "Stub %d", device);
  return OK;
}

R cuDeviceComputeCapability(int *major, int *minor, int device) { CALLED("%d", device); *major = 9; *minor = 0; return OK; }
R cuDeviceTotalMem_v2(size_t *bytes, int device) { CALLED("%d", device); *bytes = (size_t)141 << 30; return OK; }

R cuDeviceGetAttribute(int *value, int attribute, int device) {
  CALLED("%d %d", attribute, device);
  switch (attribute) {
    case 16: *value = 132; break;            /* MULTIPROCESSOR_COUNT */
    case 36: *value = 3201000; break;        /* MEMORY_CLOCK_RATE, kHz */
    case 37: *value = 6144; break;           /* GLOBAL_MEMORY_BUS_WIDTH, bits */
    case 38: *value = 60 << 20; break;       /* L2_CACHE_SIZE */
    case 75: *value = 9; break;              /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; break;              /* COMPUTE_CAPABILITY_MINOR */
    case 97: *value = 227 << 10; break;      /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    default: *value = 1;
  }
  return OK;
}

R cuGetErrorString(R code, const char **text) {
  static __thread char words[40];
  snprintf(words, sizeof words, "stub error %d", code);
  *text = words;
  return OK;
}

R cuGetErrorName(R code, const char **text) { return cuGetErrorString(code, text); }

/* --- contexts ----------------------------------------------------------------------------------------------------- */

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

R cuDevicePrimaryCtxRetain(Context **context, int device) {
  CALLED("%d", device);
  primary[device].device = device;
  primary[device].primary = 1;
  __sync_add_and_fetch(&primary[device].retained, 1);
  *context = &primary[device];
  return OK;
}

R cuDevicePrimaryCtxRelease_v2(int device) {
  CALLED("%d", device);
  __sync_sub_and_fetch(&primary[device].retained, 1);
  return OK;
}

R cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  CALLED("%d", device);
  *flags = 0;
  *active = primary[device].retained > 0;
  return OK;
}

R cuCtxCreate_v4(Context **context, void *parameters, unsigned flags, int device) {
  CALLED("%d", device);
  (void)parameters, (void)flags;
  *context = calloc(1, sizeof **context);
  (*context)->device = device;
  stack[depth++] = *context;
  return OK;
}

R cuCtxDetach(Context *context) { CALLED(); if (current() == context) depth--; return OK; }
R cuCtxPushCurrent_v2(Context *context) { CALLED("%d", context->device); stack[depth++] = context; return OK; }

R cuCtxPopCurrent_v2(Context **context) {
  CALLED();
  if (!depth) return INVALID_CONTEXT;
  *context = stack[--depth];
  return OK;
}

R cuCtxGetCurrent(Context **context) { CALLED(); *context = current(); return OK; }

R cuCtxSetCurrent(Context *context) {
  CALLED("%d", context ? context->device : -1);
  if (depth) depth--;
  if (context) stack[depth++] = context;
  return OK;
}

R cuCtxGetDevice(int *device) {
  CALLED();
  if (!depth) return INVALID_CONTEXT;
  *device = current()->device;
  return OK;
}

R cuCtxSynchronize(void) { CALLED(); return depth ? OK : INVALID_CONTEXT; }
R cuCtxGetApiVersion(Context *context, unsigned *version) { CALLED(); (void)context; *version = 13000; return OK; }

/* --- modules and launches ----------------------------------------------------------------------------------------- */

R cuModuleLoadDataEx(Module **module, const void *image, unsigned n, void *options, void **values) {
  CALLED();
  (void)n, (void)options, (void)values;
  if (!depth) return INVALID_CONTEXT;
  if (memcmp(image, "\177ELF", 4)) return 200; /* INVALID_IMAGE */
  *module = malloc(sizeof **module);
  (*module)->owner = current();
  return OK;
}

R cuModuleLoadData(Module **module, const void *image) { return cuModuleLoadDataEx(module, image, 0, NULL, NULL); }
R cuModuleUnload(Module *module) { CALLED("%d", module->owner->device); return depth ? OK : INVALID_CONTEXT; }

R cuModuleGetFunction(Function **function, Module *module, const char *name) {
  CALLED("%s", name);
  if (strstr(name, "missing")) return NOT_FOUND;
  *function = malloc(sizeof **function);
  (*function)->owner = module->owner;
  snprintf((*function)->name, sizeof (*function)->name, "%s", name);
  return OK;
}

R cuFuncGetAttribute(int *value, int attribute, Function *function) { CALLED(); (void)attribute, (void)function; *value = 0; return OK; }

R cuFuncSetAttribute(Function *function, int attribute, int value) {
  CALLED("%s %d %d", function->name, attribute, value);
  return OK;
}

R cuFuncSetBlockShape(Function *function, int x, int y, int z) { CALLED("%s %d,%d,%d", function->name, x, y, z); return OK; }

/* Which function, on which device, grid, block, dynamic shared memory, stream, parameter bytes. */
R cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                 unsigned shared, void *stream, void **parameters, void **extra) {
  static int logged = -1, lenient = 0;
  if (logged < 0) lenient = number("SKUDA_STUB_LENIENT", 0);
  if (logged < 0) logged = getenv("SKUDA_STUB_LOG") != NULL || getenv("SKUDA_STUB_FAIL") != NULL;
  if (!depth) return INVALID_CONTEXT;
  if (function->owner != current() && !lenient) return INVALID_HANDLE;
  if (!logged) return OK;
  const unsigned char *bytes = NULL;
  size_t length = 0;
  for (int i = 0; extra && extra[i]; i += 2) {
    if (extra[i] == (void *)1) bytes = extra[i + 1];
    if (extra[i] == (void *)2) length = *(size_t *)extra[i + 1];
  }
  char hex[2 * 1024 + 2] = "-";
  for (size_t i = 0; i < length && i < 1024; i++) sprintf(hex + 2 * i, "%02x", bytes[i]);
  CALLED("%s %d %u,%u,%u %u,%u,%u %u %llu %s", function->name, current()->device, gx, gy, gz, bx, by, bz, shared,
         (unsigned long long)(uintptr_t)stream, parameters ? "pointers" : hex);
  return OK;
}

typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } Config;

/* The one attribute there is: a kernel may start before the one ahead of it is done. */
R cuLaunchKernelEx(const Config *c, Function *function, void **parameters, void **extra) {
  const struct { unsigned which, pad; int allowed; } *attribute = c->attributes;
  if (c->count > 1 || (c->count && attribute->which != 6)) return NOT_SUPPORTED;
  if (c->count && attribute->allowed) CALLED("overlaps");
  return cuLaunchKernel(function, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                        c->stream, parameters, extra);
}

/* A tensor map says where the matrix begins; nothing reads more of it. */
R cuTensorMapEncodeTiled(void *map, int element, unsigned rank, void *address) {
  CALLED("%d %u %llu", element, rank, (unsigned long long)(uintptr_t)address);
  memset(map, 0, 128);
  memcpy(map, &address, sizeof address);
  return OK;
}

/* --- memory and streams ------------------------------------------------------------------------------------------- */

static struct { uintptr_t start, end; int device; } allocations[1 << 14];
static int allocated;

/* How many allocations are not freed, and their bytes. */
int stub_live(size_t *bytes) {
  *bytes = 0;
  for (int i = 0; i < allocated; i++) *bytes += allocations[i].end - allocations[i].start;
  return allocated;
}

R cuMemAlloc_v2(uintptr_t *pointer, size_t bytes) {
  CALLED("%zu", bytes);
  if (!depth) return INVALID_CONTEXT;
  void *made = NULL;
  if (posix_memalign(&made, 256, bytes ? bytes : 1)) return 2;
  if (bytes <= 1 << 20) memset(made, 0xa5, bytes); /* new memory holds anything */
  *pointer = (uintptr_t)made;
  pthread_mutex_lock(&guard);
  if (allocated < 1 << 14) {
    allocations[allocated].start = *pointer;
    allocations[allocated].end = *pointer + bytes;
    allocations[allocated++].device = current()->device;
  }
  pthread_mutex_unlock(&guard);
  return OK;
}

/* An address that no allocation can have says which device it pretends to be on: bits 60 to 62, less one. */
R cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer) {
  CALLED("%d", attribute);
  if (attribute != 9) return NOT_SUPPORTED;
  if (pointer >> 60) {
    *(int *)value = (int)(pointer >> 60 & 7) - 1;
    return OK;
  }
  for (int i = 0; i < allocated; i++) {
    if (allocations[i].start <= pointer && pointer < allocations[i].end) {
      *(int *)value = allocations[i].device;
      return OK;
    }
  }
  return INVALID_VALUE;
}

R cuMemFree_v2(uintptr_t pointer) {
  CALLED();
  if (!depth) return INVALID_CONTEXT;
  pthread_mutex_lock(&guard);
  int at = 0;
  while (at < allocated && allocations[at].start != pointer) at++;
  int known = at < allocated;
  if (known) allocations[at] = allocations[--allocated];
  pthread_mutex_unlock(&guard);
  if (!known) return INVALID_VALUE;
  free((void *)pointer);
  return OK;
}

R cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { CALLED(); *free_bytes = *total = (size_t)141 << 30; return OK; }
R cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t n) { CALLED("%zu", n); memcpy((void *)to, from, n); return OK; }
R cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t n) { CALLED("%zu", n); memcpy(to, (void *)from, n); return OK; }
R cuMemsetD8_v2(uintptr_t to, unsigned char value, size_t n) { CALLED("%zu", n); memset((void *)to, value, n); return OK; }
R cuMemsetD8Async(uintptr_t to, unsigned char value, size_t n, void *stream) { (void)stream; CALLED("%zu", n); memset((void *)to, value, n); return OK; }

R cuStreamCreate(void **stream, unsigned flags) { CALLED("%u", flags); *stream = malloc(8); return depth ? OK : INVALID_CONTEXT; }
R cuStreamDestroy_v2(void *stream) { CALLED(); free(stream); return stream ? OK : INVALID_VALUE; }
R cuStreamSynchronize(void *stream) { CALLED("%llu", (unsigned long long)(uintptr_t)stream); return OK; }
R cuStreamQuery(void *stream) { CALLED(); (void)stream; return OK; }

/* --- captures, and the graphs that they make ----------------------------------------------------------------------- */

typedef struct { void (*destroy)(void *); void *pointer; unsigned references; } UserObject;
typedef struct { UserObject *objects[8]; int count, destroyed; } Graph;

/* The graph of capture n is graphs + n. */
static Graph graphs[1 << 14];
static struct { void *stream; unsigned long long id; int status; } capturing[16];

/* Let a stream take part in a capture; 0 ends its part. A status of 2 is a capture that has become invalid. */
void stub_capture(void *stream, unsigned long long id, int status) {
  int at = 0;
  while (capturing[at].stream && capturing[at].stream != stream) at++;
  capturing[at].stream = stream, capturing[at].id = id, capturing[at].status = status;
}

R cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, void **edges, size_t *n) {
  CALLED();
  (void)edges, (void)n;
  unsigned long long capture = stream ? (unsigned long long)number("SKUDA_STUB_CAPTURING", 0) : 0;
  *status = capture ? 1 : 0;
  for (int i = 0; i < 16; i++)
    if (stream && capturing[i].stream == stream) capture = capturing[i].id, *status = capture ? capturing[i].status : 0;
  /* As in the real driver, nothing else is written unless the capture is active. */
  if (*status == 1 && id) *id = capture;
  if (*status == 1 && graph) *graph = graphs + capture;
  return OK;
}

R cuUserObjectCreate(UserObject **object, void *pointer, void (*destroy)(void *), unsigned references, unsigned flags) {
  CALLED();
  if (!references || flags != 1) return INVALID_VALUE;
  *object = malloc(sizeof **object);
  (*object)->destroy = destroy, (*object)->pointer = pointer, (*object)->references = references;
  return OK;
}

/* The driver calls a destructor in a thread of its own. It may not wait for the one that destroys the graph. */
static void *destroyed(void *object) {
  ((UserObject *)object)->destroy(((UserObject *)object)->pointer);
  free(object);
  return NULL;
}

R cuUserObjectRelease(UserObject *object, unsigned references) {
  CALLED();
  if (!object || references > object->references) return INVALID_VALUE;
  if (object->references -= references) return OK;
  pthread_t thread;
  if (pthread_create(&thread, NULL, destroyed, object)) abort();
  pthread_join(thread, NULL);
  return OK;
}

R cuGraphRetainUserObject(Graph *graph, UserObject *object, unsigned references, unsigned flags) {
  CALLED();
  if (graph < graphs || graph->destroyed || graph->count == 8 || !object || references != 1 || flags != 1)
    return INVALID_VALUE;
  graph->objects[graph->count++] = object;
  return OK;
}

/* Destroy the graph of a capture, and whatever was made of it. */
int stub_destroy(unsigned long long id) {
  graphs[id].destroyed = 1;
  while (graphs[id].count) cuUserObjectRelease(graphs[id].objects[--graphs[id].count], 1);
  return OK;
}

R cuStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, void **graph, void **edges, void **data,
                            size_t *n) {
  (void)data;
  return cuStreamGetCaptureInfo_v2(stream, status, id, graph, edges, n);
}

R cuStreamIsCapturing(void *stream, int *status) { return cuStreamGetCaptureInfo_v2(stream, status, NULL, NULL, NULL, NULL); }
R cuThreadExchangeStreamCaptureMode(int *mode) { CALLED("%d", *mode); *mode = *mode ? 0 : 2; return OK; }

/* --- the rest ----------------------------------------------------------------------------------------------------- */

/* NVRTC asks for it, to share the driver's compilation cache. */
R cuGetExportTable(const void **table, const void *id) { CALLED(); (void)id; *table = NULL; return NOT_SUPPORTED; }

#define UNSUPPORTED(name) R name(void) { note(#name, "unsupported"); return NOT_SUPPORTED; }
#include "undefined.inc"

/* The newest version of a name that this library has. */
R cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  (void)version, (void)flags;
  char exact[160];
  const char *suffixes[] = {"_v4", "_v3", "_v2", ""};
  Dl_info here;
  dladdr((void *)cuInit, &here);
  void *library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = NULL;
  for (int i = 0; i < 4 && !*function; i++) {
    snprintf(exact, sizeof exact, "%s%s", name, suffixes[i]);
    *function = dlsym(library, exact);
  }
  if (found) *found = *function ? 0 : 1;
  return *function ? OK : NOT_FOUND;
}
