#include "mpi/mpich/exit_hook.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "mpi/guarded.h"

namespace dscomm {
namespace {

[[noreturn]] void leave_or_exit(int status) {
  if (guard::calls_of_thread().depth > 0)
    guard::give_up("MPI was about to end the process; standard error may have the reason");
  std::exit(status);
}

using Exit = void (*)(int);

// Whether an ELF relocation fills a GOT entry that may point to a function, such as exit().
bool is_of_functions(uint64_t relocation_type) {
#if defined(__x86_64__)
  return relocation_type == R_X86_64_JUMP_SLOT || relocation_type == R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  return relocation_type == R_AARCH64_JUMP_SLOT || relocation_type == R_AARCH64_GLOB_DAT;
#else
  static_cast<void>(relocation_type);
  return false;
#endif
}

struct Library {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  struct Table {
    const ElfW(Rela) * first = nullptr;
    size_t bytes = 0;
  } tables[2];
};

Library read(const link_map& map) {
  Library library;
  for (const ElfW(Dyn)* entry = map.l_ld; entry->d_tag != DT_NULL; ++entry) {
    const auto* const at = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    const auto* const relocations = reinterpret_cast<const ElfW(Rela)*>(at);
    if (entry->d_tag == DT_SYMTAB) library.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
    if (entry->d_tag == DT_STRTAB) library.names = at;
    if (entry->d_tag == DT_JMPREL) library.tables[0].first = relocations;
    if (entry->d_tag == DT_PLTRELSZ) library.tables[0].bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) library.tables[1].first = relocations;
    if (entry->d_tag == DT_RELASZ) library.tables[1].bytes = entry->d_un.d_val;
  }
  return library;
}

uintptr_t page_of(uintptr_t address) {
  return address & ~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
}

// The pages of a library that the loader makes read-only after relocation (RELRO).
struct ReadOnlyPart {
  uintptr_t base, begin = 0, end = 0;
};

int find_read_only_part(dl_phdr_info* info, size_t, void* data) {
  auto* const part = static_cast<ReadOnlyPart*>(data);
  if (info->dlpi_addr != part->base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info->dlpi_phdr[i];
    if (header.p_type != PT_GNU_RELRO) continue;
    const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
    part->begin = page_of(begin);
    part->end = page_of(begin + header.p_memsz);
  }
  return 1;
}

bool write(Exit* slot, uintptr_t base) {
  ReadOnlyPart part{base};
  dl_iterate_phdr(find_read_only_part, &part);
  const auto address = reinterpret_cast<uintptr_t>(slot);
  const bool is_read_only = part.begin <= address && address < part.end;
  void* const page = reinterpret_cast<void*>(page_of(address));
  // The kernel rounds a length up to pages.
  if (is_read_only && mprotect(page, 1, PROT_READ | PROT_WRITE) != 0) return false;
  // Relaxed: the store of a pointer is atomic, and a reader may call either function.
  __atomic_store_n(slot, &leave_or_exit, __ATOMIC_RELAXED);
  if (is_read_only) mprotect(page, 1, PROT_READ);
  return true;
}

}  // namespace

bool hook_exit(const void* function) {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(function, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 ||
      map == nullptr)
    return false;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Library library = read(*map);
  if (library.symbols == nullptr || library.names == nullptr) return false;
  bool is_done = false;
  for (const Library::Table& table : library.tables) {
    for (size_t i = 0; i < table.bytes / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela) & relocation = table.first[i];
      if (!is_of_functions(ELF64_R_TYPE(relocation.r_info))) continue;
      const ElfW(Sym) & symbol = library.symbols[ELF64_R_SYM(relocation.r_info)];
      if (std::strcmp(library.names + symbol.st_name, "exit") != 0) continue;
      auto* const slot = reinterpret_cast<Exit*>(map->l_addr + relocation.r_offset);
      is_done = write(slot, map->l_addr) || is_done;
    }
  }
  return is_done;
}

}  // namespace dscomm
