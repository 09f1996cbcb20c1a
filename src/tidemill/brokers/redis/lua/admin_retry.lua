-- Make a scheduled, failed, cancelled or expired job ready, or scheduled for the time `due`. With `force`, also a
-- succeeded job, or a job whose key a succeeded job holds.

local function retry(j, force, due)
  if j.state == SCHEDULED then
    unplace(j)
    place(j, due)
    return true
  end
  local again = force and j.state == SUCCEEDED and not flagged(j.flags, LINKED)
  if j.state <= SUCCEEDED and not again then return false end
  local wait = flagged(j.flags, LINKED) and wait_of(j.id)
  if wait and not may_wait_anew(wait) then return false end
  if flagged(j.flags, LINKED) then add_end(j.id, REVIVED) end
  if j.key ~= '' then
    local key = Unique.find(j.key)
    if key and (key.holder or not force) then return false end -- at most one unfinished job per key
    Unique.put(j.key, j.id, nil, key and key.ends or 0, 0)
  end
  unfinish(j)
  j.attempt, j.limit = 0, j.policy
  j.losses, j.expires, j.error = 0, 0, ''
  drop_result(j)
  if flagged(j.flags, CANCELLING) then j.flags = j.flags - CANCELLING end
  if wait and (wait.pending > 0 or wait.what == W_BARRIER) then wait_anew(j, wait) else place(j, due) end
  return true
end
