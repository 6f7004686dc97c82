if not value then
    pcall(grant_next)
end
return { 'lost', stamp }
